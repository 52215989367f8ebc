package openai_test

import (
	"fmt"

	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
)

func ExampleParse() {
	r, _ := openai.Parse(mooncake.Completions, []byte(`{"model":"m","prompt":["one","two"],"n":2}`), openai.Limits{})
	for _, leg := range r.Parts() {
		fmt.Printf("choice %d: prompt %s, seed +%d\n", leg.Choice, leg.Patch.Prompt, leg.SeedOffset)
	}
	_, refused := openai.Parse(mooncake.Chat, []byte(`{"model":"m","messages":[],"n":1.5}`), openai.Limits{})
	fmt.Printf("%s\n", refused.JSON())
	// Output:
	// choice 0: prompt "one", seed +0
	// choice 1: prompt "one", seed +1
	// choice 2: prompt "two", seed +0
	// choice 3: prompt "two", seed +1
	// {"error":{"message":"\"messages\" is empty; send at least one message","type":"invalid_request_error","param":"messages","code":"invalid_value"}}
}
