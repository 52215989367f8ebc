package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"evenkeel/bench/rigs/asked"
	"evenkeel/bench/rigs/testbed"
)

// documentOf is the answer as parsed documents: status, content type, and the
// body, or of a stream what its events say together.
func documentOf(a answer) (map[string]any, error) {
	if a.Err != nil {
		return nil, a.Err
	}
	kind, _, _ := strings.Cut(a.Head.Get("Content-Type"), ";")
	doc := map[string]any{"status": json.Number(fmt.Sprint(a.Status)), "content_type": kind}
	if kind == "text/event-stream" {
		joined, err := joinEvents(a.Body)
		doc["body"] = joined
		return doc, err
	}
	parsed, err := asked.Parse(a.Body)
	doc["body"] = parsed
	return doc, err
}

// joinEvents makes one document of a stream. Choices are joined by index, and
// in them tool calls. Texts and lists are appended to each other; of other
// fields the last value counts that is not null.
func joinEvents(stream []byte) (map[string]any, error) {
	all := map[string]any{"choices": []any{}}
	done, err := testbed.Events(stream, func(data []byte) error {
		chunk, err := asked.Parse(data)
		if err != nil {
			return err
		}
		object, ok := chunk.(map[string]any)
		if !ok {
			return fmt.Errorf("an event is no object: %s", data)
		}
		return join(all, object)
	})
	all["done"] = done
	return all, err
}

// appended are the fields whose values in later events follow those before.
var appended = map[string]bool{"content": true, "text": true, "arguments": true, "reasoning": true, "reasoning_content": true,
	"refusal": true}

// indexed are the lists whose items say themselves which item they go on with.
var indexed = map[string]bool{"choices": true, "tool_calls": true}

func join(all, more map[string]any) error {
	for key, v := range more {
		was := all[key]
		switch v := v.(type) {
		case nil:
			if _, ok := all[key]; !ok {
				all[key] = nil
			}
		case string:
			if before, ok := was.(string); ok && appended[key] {
				v = before + v
			}
			all[key] = v
		case []any:
			before, _ := was.([]any)
			if !indexed[key] {
				all[key] = append(before, v...)
				continue
			}
			for _, item := range v {
				var err error
				if before, err = joinItem(before, item); err != nil {
					return fmt.Errorf("%s: %w", key, err)
				}
			}
			all[key] = before
		case map[string]any:
			before, ok := was.(map[string]any)
			if !ok || key == "usage" {
				before = map[string]any{}
			}
			if err := join(before, v); err != nil {
				return err
			}
			all[key] = before
		default:
			all[key] = v
		}
	}
	return nil
}

func joinItem(list []any, item any) ([]any, error) {
	object, _ := item.(map[string]any)
	number, _ := object["index"].(json.Number)
	at, err := number.Int64()
	if err != nil || at < 0 || at > 1000 {
		return nil, fmt.Errorf("an item has no index: %v", item)
	}
	for int64(len(list)) <= at {
		list = append(list, map[string]any{})
	}
	return list, join(list[at].(map[string]any), object) // the loop above made all of them
}
