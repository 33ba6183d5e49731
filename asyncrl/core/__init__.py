"""Values, decisions and Protocols that every part shares."""
