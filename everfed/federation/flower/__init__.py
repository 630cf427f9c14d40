"""The adapter to Flower. Only this folder imports it, and nothing outside does so at its top: Flower is an extra."""
