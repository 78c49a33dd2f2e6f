"""An OpenAI-compatible server with continuous batching, and a playground in the browser."""
