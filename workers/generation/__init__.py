"""The generation pool: prompts, strategies and the engine that decodes."""
