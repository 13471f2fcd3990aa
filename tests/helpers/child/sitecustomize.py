"""Loaded by every fresh Python process that the launcher starts."""

import copus_test_child

copus_test_child.prepare()
copus_test_child.load_hidden_sitecustomize()
