// Package openai reads client requests of the OpenAI API and of similar APIs. Before any work is done for a request, it refuses the request
// if an engine would refuse it late, or if it could crash an engine. The bodies of other requests are never encoded again: parts of their
// text are replaced, so that the checks see exactly the keys that the engines see.
package openai
