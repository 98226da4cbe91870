"""What a model's answer says: reasoning, content and calls of tools, told apart while it comes."""
