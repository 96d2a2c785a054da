"""What is wanted: the intent of a request, its language and its complexity."""
