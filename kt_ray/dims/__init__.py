"""What a model is: its dimensions, formats and parameters, read from config.json alone. No torch."""
