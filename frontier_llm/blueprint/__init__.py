"""What a model is made of and what it does, without torch: parameters, work, layouts, optimizer states."""
