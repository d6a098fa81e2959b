"""OpenAI's Responses API without its memory: nothing is stored, every request brings its whole conversation."""
