"""Text in, text out: tokenizer, chat template, streaming detokenizer. Knows no model and no server."""
