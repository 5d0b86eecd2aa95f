"""Services and orchestrators under load."""
