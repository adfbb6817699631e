"""Reads a text in the format `arrow` piece by piece, as the server reads what a model writes."""

from arrow_format import Arrow

text = 'Let me see. <calls>call get_weather => {"city": "Bonn"};call get_time => {};</calls>'
reader = Arrow({"get_weather": {}, "get_time": {}})  # names of tools and the schemas of their arguments
for i in range(0, len(text), 20):
    for item in reader.push(text[i : i + 20]):
        print(repr(item))
for item in reader.finish():
    print(repr(item))
