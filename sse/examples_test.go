package sse_test

import (
	"fmt"

	"evenkeel/sse"
)

// A client that asked for nothing special, and a decode engine that was asked to
// report usage and token ids so that evenkeel can count.
func Example() {
	reads := []string{ // cut where TCP likes
		`data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null,"token_ids":[19,4`,
		`]}],"usage":{"completion_tokens":2}}` + "\n\ndata: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\",\"token_ids\":[2]}]}\n",
		"\ndata: {\"choices\":[],\"usage\":{\"completion_tokens\":3}}\n\ndata: [DONE]\n\n",
	}
	framer := sse.NewFramer(0)
	filter := sse.NewFilter(sse.Options{Cached: -1, Choice: -1})
	var buf []byte
	for _, read := range reads {
		framer.Feed([]byte(read))
		for e, ok := framer.Next(); ok; e, ok = framer.Next() {
			out, end := filter.Event(e, buf[:0])
			fmt.Printf("%q after %d tokens, whole: %v\n", out, filter.Tokens(), end == sse.Complete)
		}
	}
	fmt.Println(filter.Finished(), framer.Buffered())
	// Output:
	// "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hi\"},\"finish_reason\":null}]}\n\n" after 2 tokens, whole: false
	// "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n" after 3 tokens, whole: false
	// "" after 3 tokens, whole: false
	// "data: [DONE]\n\n" after 3 tokens, whole: true
	// true 0
}

func ExampleAssembler() {
	a := sse.NewAssembler(true, 0)
	for _, event := range []string{
		`data: {"id":"chatcmpl-1","model":"dsv3","choices":[{"index":0,"delta":{"role":"assistant","content":"Hi"}}]}` + "\n\n",
		`data: {"id":"chatcmpl-1","model":"dsv3","choices":[{"index":0,"delta":{"content":" there"},"finish_reason":"stop"}]}` + "\n\n",
		sse.Done,
	} {
		if err := a.Add([]byte(event)); err != nil {
			fmt.Println(err)
		}
	}
	answer, err := a.JSON(nil)
	fmt.Println(string(answer), err)
	// Output:
	// {"id":"chatcmpl-1","object":"chat.completion","model":"dsv3","choices":[{"index":0,"message":{"role":"assistant","content":"Hi there"},"finish_reason":"stop"}]} <nil>
}
