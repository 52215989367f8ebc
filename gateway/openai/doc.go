// Package openai reads client requests of the OpenAI API and of similar APIs. It refuses a request
// early if an engine would refuse it late, or if it could crash an engine. Bodies are never encoded
// again: parts of their text are replaced, so that the checks see exactly the keys that the engines
// see.
package openai
