"""Speed of the server's front end over a simulated device: streamed tokens compared with a minimal handler, latency.

python -m bench.serving [--out FILE] [--rounds N] [--suites throughput,latency,queue]
"""
