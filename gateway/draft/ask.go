// Package draft writes a first config file, from flags or from the answers of engines
// that are asked for their settings.
package draft

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"time"
	"unicode"

	"evenkeel/engine"
	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// Limits for asking engines.
const (
	askTimeout        = 5 * time.Second // time limit of one request to an engine
	maxConcurrentAsks = 16              // engines that are asked at the same time
	maxAnswerBytes    = 1 << 20         // largest answer of an engine that is read, in bytes
	maxTextChars      = 120             // characters of an engine's text in a comment of the file
	maxModelsNamed    = 3               // models of an engine that the file names
)

// Entry is an engine of the file, with its known settings. Notes has sentences about what it
// reported and what it did not report.
type Entry struct {
	config.Engine

	Role      string // prefill, decode, aggregated, or empty: unknown
	Connector string // KV connector that the engine was started with; empty: unknown
	Bootstrap int    // port of the engine's bootstrap server (SGLang); 0: unknown
	Dead      string // why the engine gave no answer; empty: it answered, or Ask was not called
	Notes     []string

	model         string      // the first model that the engine serves
	version       string      // version of vLLM; empty: unknown
	handOff       handOffTest // result of the test request that asks for a hand-off
	slotsReported bool        // the engine itself reported Slots
}

// addNote adds a sentence to Notes.
func (e *Entry) addNote(format string, args ...any) {
	e.Notes = append(e.Notes, fmt.Sprintf(format, args...))
}

// Ask asks the engines at the entries' URLs for their settings, several at once, and fills in
// the answers. keyEnv names the environment variable with the API key for engines that want one.
func Ask(ctx context.Context, entries []Entry, keyEnv string) {
	client := engine.NewClient(engine.Options{ReadBuffer: 64 << 10})
	defer client.Close()
	var all sync.WaitGroup
	turns := make(chan struct{}, maxConcurrentAsks) // an element per engine that is being asked
	for i := range entries {
		turns <- struct{}{} // waits while maxConcurrentAsks engines are being asked
		all.Go(func() {
			defer func() { <-turns }()
			ask(ctx, client, &entries[i], keyEnv)
		})
	}
	all.Wait()
	decideRoles(entries)
}

// ask fills in what one engine answers. If the engine cannot be reached, ask sets Dead. A test
// request is sent only if nothing else shows the engine's role.
func ask(ctx context.Context, client *engine.Client, e *Entry, keyEnv string) {
	target, err := config.Target(e.Engine, &mooncake.Profile{APIKeyEnv: keyEnv})
	if err != nil {
		e.Dead = clean(err.Error())
		e.addNote("It could not be asked: %s.", e.Dead)
		return
	}
	get := getter(ctx, client, target)
	switch status, _, err := get("/health"); {
	case err != nil:
		e.Dead = causeText(err)
		e.addNote("It did not answer GET /health (%s), so nothing is known of it.", e.Dead)
		return
	case status != http.StatusOK:
		e.addNote("It answered GET /health with status %d: it may still be starting.", status)
	}
	e.handOff = untried
	version := "" // stays empty if the engine does not report it
	if status, body, err := get("/version"); err == nil && status == http.StatusOK {
		var v struct{ Version string }
		if json.Unmarshal(body, &v) == nil {
			version = clean(v.Version)
		}
	}
	e.readServerInfo(get, version)
	models := e.readModels(ctx, client, target)
	e.readMetrics(ctx, client, target, models)
	if e.Role == "" && e.model != "" { // a test request needs a model, and is only sent if the role is still unknown
		e.tryHandOff(ctx, client, target)
	}
}

// getter returns a function that asks one engine, within askTimeout.
func getter(ctx context.Context, client *engine.Client, target *engine.Target) func(path string) (status int, body []byte, err error) {
	return func(path string) (int, []byte, error) {
		ctx, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		return client.Get(ctx, target, path, maxAnswerBytes)
	}
}

// StepBudget asks an engine that prefills and decodes how many tokens a rank computes in a step at
// most; 0: it does not say so, or it does not do both.
func StepBudget(ctx context.Context, client *engine.Client, target *engine.Target) int {
	var e Entry
	e.readServerInfo(getter(ctx, client, target), "")
	return e.Budget
}

// serverInfoPaths lists the paths that report an engine's settings. With the query of the first
// one, vLLM answers in JSON. The second one is for SGLang before 0.5.3.
var serverInfoPaths = []string{"/server_info?config_format=json", "/get_server_info"}

// readServerInfo fills in the settings that /server_info reports. SGLang always has this path, vLLM
// only with VLLM_SERVER_DEV_MODE=1. version is the answer to /version, which is used for vLLM.
func (e *Entry) readServerInfo(get func(path string) (int, []byte, error), version string) {
	var body []byte
	for _, path := range serverInfoPaths {
		if status, b, err := get(path); err == nil && status == http.StatusOK {
			body = b
			break
		}
	}
	if isSGLang := e.fillFromSGLang(body); isSGLang {
		return
	}
	e.version = version
	e.addNote("Its version is %s.", orUnknown(version))
	e.fillFromVLLM(body)
}

// fillFromSGLang fills in the settings that SGLang reports. It returns false and changes nothing if
// the engine is not SGLang.
func (e *Entry) fillFromSGLang(body []byte) (isSGLang bool) {
	var reported struct {
		Version   string        `json:"version"`
		Mode      string        `json:"disaggregation_mode"`
		Bootstrap engine.Number `json:"disaggregation_bootstrap_port"`
		Slots     engine.Number `json:"max_running_requests"`
		Ranks     engine.Number `json:"dp_size"`
		Attention *bool         `json:"enable_dp_attention"`
		// Tokens per step of a rank: with DP attention, the server has divided the value of the flag
		// already.
		Budget       engine.Number `json:"chunked_prefill_size"`
		engine.Holds               // the settings by which an engine delays prompts
	}
	if json.Unmarshal(body, &reported) != nil || reported.Mode == "" {
		return false
	}
	e.addNote("It is SGLang %s.", orUnknown(clean(reported.Version)))
	e.Connector = mooncake.SGLang
	ranks := e.wholeNumber(reported.Ranks, "dp_size", engine.MostRanks)
	if ranks > 1 {
		e.Ranks = ranks
	}
	sharing := 1                                          // number of ranks that share max_running_requests
	if reported.Attention == nil || *reported.Attention { // not reported: the smaller number of slots per rank is assumed
		sharing = max(1, ranks)
	}
	if slots := e.wholeNumber(reported.Slots, "max_running_requests", engine.MostRequests*sharing); slots > 0 {
		e.Slots, e.slotsReported = slots/sharing, true
	}
	e.setRole(sglangRoles[reported.Mode], "its disaggregation_mode is "+clean(reported.Mode))
	if e.Role != "aggregated" {
		e.Bootstrap = e.wholeNumber(reported.Bootstrap, "disaggregation_bootstrap_port", math.MaxUint16)
		return true
	}
	e.fillPromptSettings(reported.Budget, &reported.Holds)
	return true
}

// fillPromptSettings fills in what only concerns an engine that prefills and decodes: the tokens
// per step of a rank (budget), and a note for each flag by which the engine delays prompts.
// evenkeel delays prompts for such engines itself, so the notes say how to start the engine without
// this delay.
func (e *Entry) fillPromptSettings(budget engine.Number, holds *engine.Holds) {
	if budget != "-1" { // -1: prompts are not cut into chunks
		e.Budget = e.wholeNumber(budget, "chunked_prefill_size", engine.MostStep)
	}
	delayingFlags, remedies := holds.Flags(e.Slots)
	interval, err := holds.Interval()
	switch {
	case err != nil:
		e.addNote("%s", sentence(err))
	case interval > 1:
		e.Interval = interval
	}
	for i := range delayingFlags {
		e.addNote("It holds prompts back itself (%s). One hold is enough: %s.", delayingFlags[i], remedies[i])
	}
}

// sglangRoles maps SGLang's disaggregation_mode to the role of the engine. Another mode gives no
// role.
var sglangRoles = map[string]string{"prefill": "prefill", "decode": "decode", "null": "aggregated"}

// fillFromVLLM fills in the settings that vLLM reports. body is the answer to /server_info; empty:
// there was none.
func (e *Entry) fillFromVLLM(body []byte) {
	var reported struct {
		Config struct {
			Transfer  json.RawMessage `json:"kv_transfer_config"`
			Scheduler struct {
				Slots    engine.Number `json:"max_num_seqs"`
				Budget   engine.Number `json:"max_num_batched_tokens"`
				Interval engine.Number `json:"prefill_schedule_interval"`
			} `json:"scheduler_config"`
		} `json:"vllm_config"`
	}
	_ = json.Unmarshal(body, &reported) // older versions answer with text, in which vllmSetting finds the role and the connector
	scheduler := &reported.Config.Scheduler
	if slots := e.wholeNumber(scheduler.Slots, "max_num_seqs", engine.MostRequests); slots > 0 { // 0: the value from the command line stays
		e.Slots, e.slotsReported = slots, true
	}
	if string(reported.Config.Transfer) == "null" {
		e.setRole("aggregated", "it has no KV connector")
	} else {
		e.setVLLMRole(vllmSetting(body, "kv_role"))
	}
	if name := vllmSetting(body, "kv_connector"); name != "" {
		if e.Connector = connectors[name]; e.Connector == "" {
			e.addNote("Its kv_connector is %s, for which there is no profile (docs/connectors.md).", name)
		}
	}
	if e.Role == "aggregated" {
		e.Budget = e.wholeNumber(scheduler.Budget, "max_num_batched_tokens", engine.MostStep)
		e.Interval = e.wholeNumber(scheduler.Interval, "prefill_schedule_interval", engine.MostStep)
		if e.Interval == 0 {
			e.addNote("It does not tell its --prefill-schedule-interval. If that is above 1, write it as prefill_schedule_interval. " +
				"From vLLM 0.33 on it acts with one rank, too.")
		}
	}
}

// setVLLMRole sets the role that follows from vLLM's kv_role. If kvRole is empty, vLLM did not
// report it, and the role stays as it is. kv_both does not say what the engine is used for.
func (e *Entry) setVLLMRole(kvRole string) {
	because := "its kv_role is " + kvRole
	switch kvRole {
	case "kv_producer":
		e.setRole("prefill", because)
	case "kv_consumer":
		e.setRole("decode", because)
	case "kv_both":
		e.addNote("Its kv_role is kv_both, which vLLM deprecates for NIXL. Start prefill engines with kv_producer and decode engines with " +
			"kv_consumer.")
	}
}

// wholeNumber returns a number that the engine reports; 0: it is not known, or it is out of range,
// and a note says so.
func (e *Entry) wholeNumber(n engine.Number, name string, most int) int {
	v, err := n.Whole(name, int64(most))
	if err != nil {
		e.addNote("%s", sentence(err))
	}
	return v
}

// sentence turns an error into a sentence for a comment of the file.
func sentence(err error) string {
	s := clean(err.Error())
	return strings.ToUpper(s[:1]) + s[1:] + "."
}

// vllmSetting finds the value of a key in vLLM's settings, which are JSON or older text; empty: it
// is not there.
func vllmSetting(body []byte, key string) string {
	m := regexp.MustCompile(key + `["']?\s*[:=]\s*["']?(\w+)`).FindSubmatch(body)
	if m == nil {
		return ""
	}
	return clean(string(m[1]))
}

// connectors maps vLLM's names of connectors to those of evenkeel's profiles.
var connectors = map[string]string{
	"NixlConnector": mooncake.NIXLPull, "NixlPullConnector": mooncake.NIXLPull, "NixlPushConnector": mooncake.NIXLPush, "MooncakeConnector": mooncake.VLLMMooncake,
	"MooncakeConnectorV1": mooncake.AscendMooncakeV1, "MooncakeHybridConnector": mooncake.AscendMooncakeV1, "MooncakeLayerwiseConnector": mooncake.AscendLayerwise,
}

// setRole sets the role that an engine reports. If the user gave another role, that one stays and a
// note says so. because is the reason for the role, as a part of the note; an empty role changes
// nothing.
func (e *Entry) setRole(role, because string) {
	switch {
	case role == "": // the engine reports none
	case e.Role == "":
		e.Role = role
		e.addNote("It is %s engine: %s.", aOrAn(role), because)
	case role != e.Role:
		e.addNote("You call it %s engine, but %s, which makes it %s engine. Check its start command.", aOrAn(e.Role), because, aOrAn(role))
	}
}

// aOrAn returns the role with its article.
func aOrAn(role string) string {
	if role == "aggregated" {
		return "an " + role
	}
	return "a " + role
}

// readModels writes into Notes which models the engine serves, or why it does not say so, and sets
// e.model to the first one. It returns the models.
func (e *Entry) readModels(ctx context.Context, client *engine.Client, target *engine.Target) []engine.Model {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	models, err := engine.Models(ctx, client, target)
	var status *engine.StatusError
	var badPage *engine.PageError
	wantsKey := errors.As(err, &status) && (status.Status == http.StatusUnauthorized || status.Status == http.StatusForbidden)
	switch {
	case errors.As(err, &badPage):
		e.addNote("%s", sentence(badPage))
	case wantsKey:
		e.addNote("It wants an API key. Export it as OPENAI_API_KEY and run init again, and start the proxy with it.")
	case err != nil:
		e.addNote("GET /v1/models did not tell its models: %s.", causeText(err))
	case len(models) == 0:
		e.addNote("GET /v1/models lists no model.")
	}
	if len(models) > 0 {
		e.model = models[0].ID
	}
	for i, m := range models {
		if i == maxModelsNamed {
			e.addNote("It serves %d more models.", len(models)-i)
			break
		}
		if m.MaxModelLen > 0 {
			e.addNote("It serves %q, with a context of %d tokens.", clean(m.ID), m.MaxModelLen)
		} else {
			e.addNote("It serves %q.", clean(m.ID))
		}
	}
	return models
}

// readMetrics writes into Notes what the engine's metrics show: the size of its KV cache, and its
// ranks unless their number is known.
func (e *Entry) readMetrics(ctx context.Context, client *engine.Client, target *engine.Target, models []engine.Model) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	sample, err := engine.Scrape(ctx, client, target)
	var badPage *engine.PageError
	if errors.As(err, &badPage) {
		e.addNote("%s", sentence(badPage))
		return
	}
	if err != nil {
		e.addNote("GET /metrics could not be read: %s. Without its gauges, other clients of this engine are not seen.", causeText(err))
		return
	}
	if ranks := len(sample.Engines()); ranks > 1 && e.Ranks == 0 { // the metrics of each rank have a label of their own
		e.Ranks = ranks
		e.addNote("Its metrics name %d DP ranks.", ranks)
	}
	memories := sample.Memories(models)
	misread := memories.Of(-1)
	switch tokens := memories.Tokens(); {
	case tokens > 0:
		e.addNote("Its KV cache has room for %d tokens in all.", tokens)
	case misread.Misread.Tokens > 0:
		e.addNote("By %s its KV cache would have room for %d tokens, less than one request needs (%d), so that number means something else. "+
			"Write kv_tokens of each rank: the KV cache size that it logs at its start.",
			misread.Misread.From, misread.Misread.Tokens, misread.Context)
	default:
		e.addNote("It does not tell how many tokens its KV cache holds. If it never does, write kv_tokens of each rank.")
	}
}

// causeText is the cause of a failed call without the address, because the note stands beside the
// engine's URL.
func causeText(err error) string {
	var call *engine.Error
	if errors.As(err, &call) && call.Err != nil { // call.Err is the cause, and call adds the address
		err = call.Err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Sprintf("no answer within %v", askTimeout)
	}
	return clean(err.Error())
}

// clean makes text from an engine safe for a comment of one line: printable characters only, and a
// limited length.
func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
	if r := []rune(s); len(r) > maxTextChars {
		s = string(r[:maxTextChars]) + "..."
	}
	return strings.TrimSpace(s)
}

// orUnknown returns a text, or "unknown" in place of an empty one.
func orUnknown(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}
