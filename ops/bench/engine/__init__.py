"""The engine bench: the same prompts on our engine and its peers, each in a process of its own, in turns."""
