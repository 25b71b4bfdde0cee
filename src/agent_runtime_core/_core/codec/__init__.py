"""Values as JSON text and back."""
