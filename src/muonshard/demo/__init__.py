"""`muonshard demo`: trains a small language model twice, with AdamW and with Muon, and compares."""
