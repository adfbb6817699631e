"""The HTTP server over an engine, in OpenAI's words; it schedules nothing and touches no device. Extra: "serve"."""
