"""One stack with real models for all tests of this folder; the last of them kill it part by part."""
