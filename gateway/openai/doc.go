// Package openai reads client requests of the OpenAI API and of similar APIs. It refuses, before
// any work is done for them, requests that an engine would refuse late or would
// not survive. Other requests are forwarded by splicing, never encoded
// again, so that the checks see exactly the keys that the engines see.
package openai
