"""Generation: requests, their schedule, sampling, and the driver's side of it. No actors here."""
