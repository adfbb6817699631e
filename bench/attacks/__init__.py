"""Resource attacks on a running server: what each costs a neighbour's streams, /health, small requests and memory."""
