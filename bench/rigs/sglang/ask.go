package main

import (
	"context"
	"encoding/json"
	"fmt"

	"evenkeel/bench/rigs/asked"
	"evenkeel/bench/rigs/testbed"
)

type body = asked.Body

// answer is what a server said, which value reads.
type answer struct{ asked.Answer }

func ask(ctx context.Context, method, url string, of any) answer {
	return answer{asked.Ask(ctx, method, url, of)}
}

func listen(ctx context.Context, method, url string, of any, heard func(sofar []byte)) answer {
	return answer{asked.Listen(ctx, method, url, of, heard)}
}

// value is the answer as a document: its status, its kind, and its body. A stream has the last
// event of each index, and each event before it must have a beginning of its ids.
func (a answer) value() (map[string]any, error) {
	if a.Err != nil {
		return nil, a.Err
	}
	kind := a.Head.Get("Content-Type")
	doc := map[string]any{"status": json.Number(fmt.Sprint(a.Status)), "kind": kind}
	if len(a.Body) == 0 {
		return doc, nil
	}
	if kind != "text/event-stream; charset=utf-8" && kind != "text/event-stream" {
		v, err := asked.Parse(a.Body)
		doc["body"] = v
		return doc, err
	}
	last := map[string]any{}
	done, err := testbed.Events(a.Body, func(data []byte) error {
		v, err := asked.Parse(data)
		if err != nil {
			return err
		}
		event, ok := v.(map[string]any)
		if !ok {
			return fmt.Errorf("an event is no object: %.200s", data)
		}
		index := fmt.Sprint(event["index"])
		if before, ok := last[index].(map[string]any); ok && !begins(event["output_ids"], before["output_ids"]) {
			return fmt.Errorf("an event does not go on with the one before: %.200s", data)
		}
		last[index] = event
		return nil
	})
	doc["body"], doc["done"], doc["kind"] = last, done, "text/event-stream"
	return doc, err
}

// begins says whether a list of ids begins with another one.
func begins(all, with any) bool {
	long, _ := all.([]any)
	short, _ := with.([]any)
	if len(short) > len(long) {
		return false
	}
	for i, v := range short {
		if v != long[i] {
			return false
		}
	}
	return true
}
