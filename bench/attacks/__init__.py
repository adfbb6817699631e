"""Resource attacks on a running server: their cost for a neighbour's streams, /health, small requests and memory."""
