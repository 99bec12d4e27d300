"""Snapshots that earlier versions wrote, and the program that wrote them: formats are a promise."""
