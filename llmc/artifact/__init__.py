"""Writing and reading artifacts: evaluating weights, writing the folder, inspecting its contents."""
