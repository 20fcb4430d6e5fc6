"""Finished and running runs beside each other: their numbers, their picture, their page. Reads what runs leave."""
