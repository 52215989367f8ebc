// Package openai reads client requests of the OpenAI API and refuses, before
// anything is spent on them, those that an engine would refuse late or would
// not survive. What it lets through is forwarded by splicing, never encoded
// again, so it decides by the exact keys that the engines see.
package openai
