package main

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"

	"evenkeel/bench/rigs/asked"
)

// differs are the fields that differ from one answer of the same server to the next.
var differs = regexp.MustCompile(`\.meta_info\.(e2e_latency|response_sent_to_client_ts|request_received_ts|[a-z_]+_(time|ts|latency|duration|throughput)|inference_time|decode_throughput|queue_time|prefill_launch_(delay|latency))$`)

// compare says what differs between what the server says and what comes through evenkeel. Where the
// client names its requests, their names must be the same.
func compare(direct, through map[string]any, named bool) (different []string) {
	list, _ := asked.Compare(direct, through, func(d asked.Difference) bool {
		return differs.MatchString(d.Path) || !named && strings.HasSuffix(d.Path, ".meta_info.id")
	})
	for _, d := range list {
		different = append(different, d.String())
	}
	return different
}

// refusal is the text of a refusal; own says that it is evenkeel's.
func refusal(doc map[string]any) (text string, own bool) {
	b, _ := doc["body"].(map[string]any)
	if e, ok := b["error"].(map[string]any); ok {
		_, own = e["code"].(string)
		return asked.Show(e["message"]), own
	}
	return asked.Show(b["error"]), false
}

// judge compares two answers, of which both may be refusals. A stream's refusal may come as a
// status or as its first event. refuses says that evenkeel is to refuse what SGLang answers.
func judge(direct, through answer, named, refuses bool) (same bool, said string) {
	a, errA := direct.value()
	b, errB := through.value()
	if errA != nil || errB != nil {
		return false, fmt.Sprintf("directly: %v (%v); through evenkeel: %v (%v)", direct, errA, through, errB)
	}
	a, b = early(a), early(b)
	if own, is := refusal(b); refuses && is {
		return fmt.Sprint(b["status"]) == "400", fmt.Sprintf("refused by evenkeel with %v: %s", b["status"], own)
	}
	if refuses {
		return false, fmt.Sprintf("evenkeel was to refuse it and answered %v", through)
	}
	if status := fmt.Sprint(a["status"]); status != "200" && status == fmt.Sprint(b["status"]) {
		text, _ := refusal(a)
		if own, is := refusal(b); is {
			return true, fmt.Sprintf("%s by evenkeel: %s; SGLang: %s", status, own, text)
		}
	}
	if list := compare(a, b, named); len(list) > 0 {
		return false, fmt.Sprintf("%d fields: %s", len(list), strings.Join(list[:min(len(list), 4)], "; "))
	}
	return true, fmt.Sprintf("same, %v", a["status"])
}

// early is a document with the status of the refusal that a stream consists of: its first event has
// an error, or one that the scheduler refused ends with its first event.
func early(doc map[string]any) map[string]any {
	events, _ := doc["body"].(map[string]any)
	only, _ := events["<nil>"].(map[string]any)
	if doc["kind"] != "text/event-stream" || len(events) != 1 {
		return doc
	}
	e, ok := only["error"].(map[string]any)
	if meta, _ := only["meta_info"].(map[string]any); !ok {
		reason, _ := meta["finish_reason"].(map[string]any)
		if reason["type"] != "abort" || reason["status_code"] == nil {
			return doc
		}
		e = map[string]any{"message": reason["message"], "code": reason["status_code"]}
	}
	return map[string]any{"status": json.Number(fmt.Sprint(e["code"])), "kind": "application/json", "body": map[string]any{"error": e}}
}
