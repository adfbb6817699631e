"""The fault run: kills, stops, disconnects, overload and damaged bodies; every response is checked."""
