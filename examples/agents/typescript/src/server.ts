// A reasoner in another language: the legal move that saves the most memory traffic comes first.
//
// Serves warpsmith.v1.ReasoningService on the port given as the only argument; stubs are generated from the contract.
import { Server, ServerCredentials, status } from "@grpc/grpc-js";
import { Analysis, Cost, LegalMove } from "./generated/warpsmith/v1/analysis.js";
import { Hypothesis } from "./generated/warpsmith/v1/hypothesis.js";
import {
  ProposeHypothesesResponse,
  ReasoningServiceService,
  type ReasoningServiceServer,
} from "./generated/warpsmith/v1/reasoning_service.js";

const DEFAULT_LIMIT = 8;

function traffic(cost: Cost | undefined): number {
  return cost ? cost.readBytes + cost.writeBytes + cost.extraBytes : 0;
}

function savedBytes(legal: LegalMove): number {
  return traffic(legal.before) - traffic(legal.after);
}

function hypothesis(analysis: Analysis, legal: LegalMove): Hypothesis {
  return Hypothesis.fromPartial({
    moves: [...analysis.moves, legal.move!],
    newMoveCount: 1,
    predictedSpeedup: (traffic(legal.before) + 1) / (traffic(legal.after) + 1),
    rationale: `saves ${savedBytes(legal)} bytes: ${legal.effect}`,
    source: "least_traffic_ts",
  });
}

const reasoning: ReasoningServiceServer = {
  proposeHypotheses(call, reply) {
    const { analysis, limit } = call.request;
    if (!analysis || analysis.groups.length === 0) {
      reply({ code: status.INVALID_ARGUMENT, details: "the request has no analysis with groups" });
      return;
    }
    const ranked = [...analysis.legalMoves].sort((one, other) => savedBytes(other) - savedBytes(one));
    const hypotheses = ranked.slice(0, limit || DEFAULT_LIMIT).map((legal) => hypothesis(analysis, legal));
    reply(null, ProposeHypothesesResponse.fromPartial({ hypotheses })); // fields that the contract gains stay empty
  },
};

const server = new Server();
server.addService(ReasoningServiceService, reasoning);
server.bindAsync(`127.0.0.1:${process.argv[2] ?? 50061}`, ServerCredentials.createInsecure(), (error, port) => {
  if (error) throw error;
  console.log(`127.0.0.1:${port}`);
});
