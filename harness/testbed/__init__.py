"""Context managers that bring up engines, link and load, and take them down."""
