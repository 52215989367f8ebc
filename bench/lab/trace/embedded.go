package trace

import (
	"bytes"
	_ "embed" // the two traces
)

//go:embed azure-2023-conv.csv.gz
var azureCSV []byte

//go:embed mooncake-conversation.jsonl.gz
var mooncakeLines []byte

// Azure returns an embedded real trace: 19,366 requests, an hour of Azure's
// conversation trace of 2023 (see NOTICE).
func Azure() *Trace { return embedded("azure-2023-conv.csv.gz", AzureCSV, azureCSV) }

// Mooncake returns an embedded real trace: 12,031 requests, an hour of
// Mooncake's conversation trace (see NOTICE). Its prompts are ten times as long
// as Azure's, and their hash ids tell which blocks they share.
func Mooncake() *Trace {
	return embedded("mooncake-conversation.jsonl.gz", MooncakeJSONL, mooncakeLines)
}

func embedded(name string, format Format, file []byte) *Trace {
	t, err := Parse(bytes.NewReader(file), Options{Format: format, Name: name})
	if err != nil { // it is part of the program
		panic(err)
	}
	return t
}
