package gateway_test

import (
	"fmt"

	"evenkeel/bench/lab/refengine"
)

const messagesPath = "/v1/messages"

// wordsOf is the body of a message to a prompt, with more members.
func wordsOf(prompt, more string) string {
	return fmt.Sprintf(`{%s"model":%q,"max_tokens":4000,"messages":[{"role":"user","content":%q}]}`, more, model, prompt)
}

// takesMessages are engines that take hand-offs of messages.
func takesMessages(o options) options {
	o = nixl(o)
	for _, list := range [][]refengine.Config{o.prefill, o.decode} {
		for i := range list {
			if list[i].Version == "" {
				list[i].Version = "0.32.0"
			}
		}
	}
	return o
}
