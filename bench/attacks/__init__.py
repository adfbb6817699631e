"""Resource attacks on a running server: their effect on a neighbour's streams, /health, small requests and memory."""
