"""The KV cache as the scheduler sees it: pages and the prefixes they hold. It holds no memory and knows no device."""
