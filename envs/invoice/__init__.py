"""Invoices: a task with tools, whose answer is checked exactly."""

from agentkit.envs.invoice.env import Invoice as Invoice
