"""How families write reasoning and tool calls: one file for each format, which parses, renders and constrains it."""
