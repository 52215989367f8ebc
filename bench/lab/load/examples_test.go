package load

import (
	"context"
	"fmt"
	"net/http/httptest"

	"evenkeel/bench/lab/trace"
)

func ExampleRun() {
	server := httptest.NewServer(&fake{}) // evenkeel, or an engine
	defer server.Close()
	result, err := Run(context.Background(), Config{
		URLs: []string{server.URL}, Requests: trace.Azure().Requests[:20], MaxOutput: 30,
		Concurrency: 4, Chat: 0.5, Stream: 1, Usage: 0.5,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(result.OK, result.Failed, result.Wrong, result.All.TTFT.N)
	// Output: 20 0 0 20
}
