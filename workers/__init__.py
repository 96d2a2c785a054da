"""The router and the three worker pools; the only place for torch, transformers and faiss."""
