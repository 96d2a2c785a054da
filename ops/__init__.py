"""Commands, the embedded servers, configuration and content for operators and newcomers."""
