"""Large bodies: processes that read the JSON, check the fields, render templates and tokenize, within limits."""
