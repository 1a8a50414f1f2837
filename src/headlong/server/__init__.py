"""The HTTP server: OpenAI- and Anthropic-compatible endpoints over one or more engines."""
