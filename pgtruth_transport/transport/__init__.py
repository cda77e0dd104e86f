"""The kombu transport ``pgtruth://``."""
