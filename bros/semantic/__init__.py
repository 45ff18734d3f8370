"""Programs of many calls: semantic variables, the graph, objectives, and the front end."""
