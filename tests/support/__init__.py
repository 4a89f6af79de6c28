"""What tests import. It has no tests of its own here."""
