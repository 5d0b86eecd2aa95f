"""Language models: the client, a turn of an agent, and answers made safe and sound."""
