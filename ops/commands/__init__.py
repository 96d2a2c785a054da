"""The commands of `gea`, a module a subject. Importing them loads neither torch nor a Kafka client."""
