"""Buying a study pack: order and event in one transaction, a saga for the money, consumers for the rest."""

GROUP_NAMES = ("notifications", "payouts", "analytics", "feed")  # of the consumers: known without importing them
