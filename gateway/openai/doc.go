// Package openai reads client requests of the OpenAI API and of similar APIs. It refuses requests that an engine would refuse late, or
// would not survive, before any work is done for them. Other requests are forwarded by splicing. They are never encoded again, so the
// checks see exactly the keys that the engines see.
package openai
