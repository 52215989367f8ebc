package draft

import (
	"bytes"
	"cmp"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"evenkeel/gateway/config"
	"evenkeel/mooncake"
)

// defaultSlots is the default of serve for the number of requests that a decode rank runs at once.
const defaultSlots = 32

// File returns the text of a config file with these engines, and with the settings in which cfg
// differs from the defaults. It parses the text first, so that `evenkeel check` accepts the file.
func File(cfg *config.Config, entries []Entry) ([]byte, error) {
	w := &writer{}
	w.comment("", "evenkeel's config, written by `evenkeel init`.",
		"`evenkeel check --config FILE` reads it as serve does, and with --probe it sends one tiny request through every pair of engines.",
		"Keys that are not here have their defaults; docs/configuration.md lists every key.",
		"A running proxy reads this file again when it changes.")
	w.line("")
	clients := "Clients send their requests here."
	if host, _, err := net.SplitHostPort(cfg.Listen); err == nil && config.Loopback(host) {
		clients += " Only this machine reaches it; without the host, every address of the machine does."
	}
	w.key("listen", quote(cfg.Listen), clients)
	w.line("")
	w.line("admin:")
	w.key("  listen", quote(cfg.Admin.Listen),
		"Operators find /metrics, /readyz and the live page here. Another address than loopback needs token_file.")
	w.profiles(cfg, entries)
	w.engines(entries)
	w.otherSettings(cfg, len(ofRole(entries, "aggregated")) > 0)
	text := w.Bytes()
	if _, err := config.Parse("the new file", text); err != nil {
		return nil, err
	}
	return text, nil
}

type writer struct {
	bytes.Buffer
	written map[string]bool // sentences that were written as comments on keys of engines; each is written once
	profile string          // profile of engines that either prefill or decode
	sglang  bool            // the engines of this profile are SGLang
}

// firstTime returns a sentence that was not written yet, and else an empty text, so that only the
// first of several equal keys has a comment.
func (w *writer) firstTime(sentence string) string {
	if w.written[sentence] {
		return ""
	}
	if w.written == nil {
		w.written = map[string]bool{}
	}
	w.written[sentence] = true
	return sentence
}

func (w *writer) line(format string, args ...any) { fmt.Fprintf(w, format+"\n", args...) }

// key writes a key and its value, and the sentence as a comment after them; empty: no comment.
func (w *writer) key(key, value, sentence string) {
	if sentence == "" {
		w.line("%s: %s", key, value)
		return
	}
	w.line("%-30s # %s", key+": "+value, sentence)
}

// comment writes each sentence as a YAML comment on a line of its own.
func (w *writer) comment(indent string, sentences ...string) {
	for _, s := range sentences {
		w.line("%s# %s", indent, s)
	}
}

// profiles writes the profiles: one for engines that prefill or decode, and one for aggregated
// engines, if there are such engines. Behind them, it writes the listener for callbacks, if the
// connector needs one.
func (w *writer) profiles(cfg *config.Config, entries []Entry) {
	aggregated := ofRole(entries, "aggregated")
	p := cfg.Profiles[config.DefaultProfile]
	w.line("")
	w.comment("", "What cannot be asked of an engine, by kind of engine. Engines that name no profile have the profile ascend,",
		"and those under engines.aggregated the profile aggregated.")
	w.line("profiles:")
	onlyAggregated := len(aggregated) > 0 && len(aggregated) == len(entries)
	if !onlyAggregated {
		connector := w.pairProfile(&p, entries)
		defer w.callbackListener(cfg, connector) // written after the last profile, because the listener begins another section
	}
	if len(aggregated) > 0 {
		w.aggregatedProfile(cfg, &p, aggregated)
	}
}

// aggregatedProfile writes the profile of engines that prefill and decode. They hand nothing over,
// but SGLang has a connector of its own.
func (w *writer) aggregatedProfile(cfg *config.Config, p *mooncake.Profile, aggregated []Entry) {
	connector := cmp.Or(cfg.Profiles[config.DefaultAggregated].Connector, mooncake.None)
	sentence := "These engines hand nothing over."
	if connector == mooncake.SGLang || slices.ContainsFunc(aggregated, func(e Entry) bool { return e.Connector == mooncake.SGLang }) {
		connector = mooncake.SGLang
		sentence = "These engines are SGLang, and hand nothing over."
	}
	w.line("  %s:", config.DefaultAggregated)
	w.key("    connector", connector, sentence)
	w.apiKey(p)
}

// apiKey writes the key of a profile that names the environment variable with the engines' API key.
func (w *writer) apiKey(p *mooncake.Profile) {
	if p.APIKeyEnv != "" {
		w.key("    api_key_env", p.APIKeyEnv, "The environment variable with the key that the engines want.")
	}
}

// pairProfile writes the profile of engines that either prefill or decode, and returns their
// connector: the one that the user gave, else the one that the engines report, else the default.
func (w *writer) pairProfile(p *mooncake.Profile, entries []Entry) (connector string) {
	var reported []string
	for _, e := range entries {
		if e.Role != "aggregated" && e.Connector != "" && !slices.Contains(reported, e.Connector) {
			reported = append(reported, e.Connector)
		}
	}
	given := p.Connector
	connector = given
	sentence := "The KV connector that the engines were started with."
	switch {
	case given == "" && len(reported) == 1:
		connector = reported[0]
	case given == "":
		connector = mooncake.AscendMooncakeV1
		sentence = "No engine told its connector, and this is the default. Write the one that the engines were started with: " +
			strings.Join(mooncake.Connectors(), ", ") + "."
		if len(reported) > 1 {
			sentence = "The engines have several connectors (" + strings.Join(reported, ", ") +
				"). Give each kind a profile of its own, and name it in the engines' profile key."
		}
	case len(reported) > 0 && !slices.Equal(reported, []string{given}):
		sentence = "You chose this connector, but the engines say that they have " + strings.Join(reported, ", ") + "."
	}
	w.profile, w.sglang = profileOf(connector), connector == mooncake.SGLang
	w.line("  %s:", w.profile)
	w.key("    connector", connector, sentence)
	if connector == mooncake.NIXLPull || connector == mooncake.NIXLPush {
		w.key("    kv_hold_timeout", "30s", "This is the default of vLLM's kv_lease_duration. "+
			"No KV is believed after it. Start the engines with 120 or more (in kv_connector_extra_config), "+
			"and write the same here.")
	}
	w.apiKey(p)
	w.chatResume(connector, entries)
	for _, e := range entries {
		if e.Bootstrap > 0 && connector == mooncake.SGLang {
			w.key("    bootstrap_port", strconv.Itoa(e.Bootstrap), "The port of the bootstrap server on a prefill engine's host.")
			break
		}
	}
	return connector
}

// chatResume writes the key that says how a chat continues after a vllm-ascend decode engine has
// preempted it. The value depends on the versions of the engines that are not aggregated, because
// aggregated engines have another profile.
func (w *writer) chatResume(connector string, entries []Entry) {
	if p := (&mooncake.Profile{Connector: connector}); !p.Ascend() {
		return
	}
	how, sentence := mooncake.ChatResumeAscend, "A chat that a decode engine gives back in its middle goes on by token ids. For vllm-ascend "+
		"before 0.26, write continue_final_message."
	for _, e := range entries {
		var minor int
		parsed, _ := fmt.Sscanf(e.version, "0.%d.", &minor)
		if parsed == 1 && minor < 26 && e.Role != "aggregated" { // an unknown version counts as a later one
			how, sentence = mooncake.ChatResumeContinue, "A chat that a decode engine gives back in its middle goes on by its text. From "+
				"vllm-ascend 0.26 on, write ascend_private, which is exact."
		}
	}
	w.key("    chat_resume", how, sentence)
}

// profileOf names the profile of a connector after the connector's engine.
func profileOf(connector string) string {
	switch connector {
	case mooncake.NIXLPull, mooncake.NIXLPush, mooncake.VLLMMooncake:
		return "vllm"
	case mooncake.AscendMooncakeV1, mooncake.AscendLayerwise:
		return "ascend"
	}
	return connector // for example sglang, which is the name of the engine already
}

// callbackListener writes the address that decode engines call back. Only one connector needs it.
func (w *writer) callbackListener(cfg *config.Config, connector string) {
	if connector != mooncake.AscendLayerwise {
		return
	}
	listen, sentence := cfg.Bind.Listen, "Decode engines call back here, and nobody else may reach it."
	if listen == "" {
		listen, sentence = "127.0.0.1:8010",
			"Decode engines call back here. Write an address of this machine that they reach, and nobody else does."
	}
	w.line("\nbind:")
	w.key("  listen", quote(listen), sentence)
}

// engines writes the engines of each role. Those whose role is not known are written as comments,
// for the user to move.
func (w *writer) engines(entries []Entry) {
	w.line("\nengines:")
	onlyAggregated := len(ofRole(entries, "aggregated")) > 0 && len(ofRole(entries, "prefill"))+len(ofRole(entries, "decode")) == 0
	for _, side := range []struct{ role, empty, about string }{
		{"prefill", "No prefill engine is known. Without one, every request is refused.", "They compute prompts and hand their KV over."},
		{"decode", "No decode engine is known. Without one, every request is refused.", "They write answers. List every rank of a group: one that is missing still slows the others."},
		{"aggregated", "", "They compute prompts and write answers. List every rank of a group: one that is missing still slows the others."},
	} {
		list := ofRole(entries, side.role)
		if len(list) == 0 {
			if side.role != "aggregated" && !onlyAggregated { // both sides are needed, so an empty one is written
				w.key("  "+side.role, "[]", side.empty)
			}
			continue
		}
		w.key("  "+side.role, "", side.about)
		for i, e := range list {
			if i == 0 || !slices.Equal(e.Notes, list[i-1].Notes) { // equal notes are written once, for the engines below, too
				w.comment("    ", e.Notes...)
			}
			w.engineKeys("    ", side.role, e)
		}
	}
	unknown := ofRole(entries, "")
	if len(unknown) == 0 {
		return
	}
	w.line("")
	w.comment("", "It is not known whether these prefill or decode. Move each to engines.prefill, engines.decode or engines.aggregated,",
		"or run init again and write the role before the address: --probe prefill=HOST:PORT decode=HOST:PORT.")
	for _, e := range unknown {
		w.comment("", e.Notes...)
		entry := writer{profile: w.profile, sglang: w.sglang}
		entry.engineKeys("  ", "", e)
		w.comment("", strings.Split(strings.TrimRight(entry.String(), "\n"), "\n")...)
	}
}

// ofRole returns the entries with this role; empty: with an unknown role.
func ofRole(entries []Entry, role string) (list []Entry) {
	for _, e := range entries {
		if e.Role == role {
			list = append(list, e)
		}
	}
	return list
}

// engineKeys writes one engine with its keys. role is the list in which the engine stands; empty:
// the role is not known. Only the lists decode and aggregated have keys for slots.
func (w *writer) engineKeys(indent, role string, e Entry) {
	w.line("%s- url: %s", indent, e.URL)
	if w.profile != "" && w.profile != config.DefaultProfile && role != "aggregated" {
		w.key(indent+"  profile", w.profile, "")
	}
	if e.Ranks > 0 {
		w.key(indent+"  ranks", strconv.Itoa(e.Ranks), w.firstTime("So many DP ranks stand behind this URL."))
	}
	if role != "decode" && role != "aggregated" { // the keys below are for ranks that write answers
		return
	}
	if role == "decode" || e.Ranks == 0 { // an aggregated engine with several ranks is a group of its own
		w.key(indent+"  group", "main",
			w.firstTime("Ranks of one DP deployment step together and have one group. Give each deployment a name of its own."))
	}
	w.key(indent+"  slots", strconv.Itoa(cmp.Or(e.Slots, defaultSlots)), w.firstTime(w.slotsSentence(role, &e)))
	switch {
	case role != "aggregated": // only ranks that also prefill have a budget
	case e.Budget > 0:
		w.key(indent+"  token_budget", strconv.Itoa(e.Budget), w.firstTime("A step of the rank computes so many tokens at most."))
	default:
		w.key(indent+"  # token_budget", "8192", w.firstTime("Nothing tells how many tokens a step of the rank computes at most. Write its "+
			"--max-num-batched-tokens, which is often 8192 or 16384 on large GPUs and 2048 elsewhere."))
	}
	if e.Interval > 1 {
		w.key(indent+"  prefill_schedule_interval", strconv.Itoa(e.Interval), w.firstTime("The rank computes prompts in every so many steps."))
	}
}

// slotsSentence says where the number of slots comes from, and with which flag of the engine it
// must agree.
func (w *writer) slotsSentence(role string, e *Entry) string {
	flag := "its --max-num-seqs"
	// A decode engine that did not report its connector has that of the profile, which w.sglang is
	// about.
	isSGLang := e.Connector == mooncake.SGLang || w.sglang && role == "decode"
	if isSGLang {
		flag = "its --max-running-requests, divided by the number of ranks with DP attention"
	}
	switch {
	case e.Slots == 0:
		return "Nothing tells how many requests the rank runs at once. Write " + flag +
			": with more, requests wait inside the engine; with less, it idles."
	case e.slotsReported:
		return "The rank runs so many requests at once: " + flag + "."
	}
	return "You said that a rank runs so many requests at once (--slots). Compare " + flag + "."
}

// otherSettings writes the other settings that flags may change, and examples of keys that most
// proxies need later. tokenize adds the example of counting tokens with an engine.
func (w *writer) otherSettings(cfg *config.Config, tokenize bool) {
	defaults := config.Default()
	if cfg.Dispatch.Policy != defaults.Dispatch.Policy {
		w.line("\ndispatch:")
		w.key("  policy", quote(cfg.Dispatch.Policy), "The policy that chooses decode ranks (docs/policies.md).")
	}
	if r := cfg.Prefill.Retry; r != defaults.Prefill.Retry {
		w.line("\nprefill:\n  retry:")
		w.key("    attempts", strconv.Itoa(r.Attempts), "A prefill is tried so often in all.")
		w.key("    base", r.Base.String(), "The first backoff is a random time up to this one.")
	}
	if tokenize {
		w.comment("", "Aggregated ranks get equal work if evenkeel knows how many tokens a prompt has. Take the # away, and an engine's",
			"/tokenize counts them, which costs one call for each prompt that is text:")
		if cfg.Prefill.Retry != defaults.Prefill.Retry { // the section prefill was written above, so only a key is added to it
			w.line("#   index: {tokenize: engine}")
		} else {
			w.line("# prefill: {index: {tokenize: engine}}")
		}
	}
	if cfg.Log != defaults.Log {
		w.line("\nlog:")
		w.key("  level", cfg.Log.Level, "Or debug, info, warn, error.")
		w.key("  requests", quote(cfg.Log.Requests),
			"A file for one JSON line for each request, without the text of prompts; \"-\" is stdout, \"\" is none.")
	}
	w.line("")
	w.comment("", "What most proxies need sooner or later. Take the # away to use it.")
	w.line(`# keys_file: keys.yaml         # API keys of clients, as ` + "`evenkeel keys new --name NAME`" + ` writes them.
# tls: {cert_file: cert.pem, key_file: key.pem}   # HTTPS for clients.
# tracing: {endpoint: "http://collector:4318"}    # OpenTelemetry spans (docs/traces.md).`)
	if cfg.Log.Requests == "" {
		w.line(`# log: {requests: requests.jsonl}                # One JSON line for each request.`)
	}
}

// quote quotes a text, so that YAML reads it as a string.
func quote(s string) string { return strconv.Quote(s) }
